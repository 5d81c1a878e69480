"""Paths of Ascend: operators in Ascend C, and MindSpore's own."""
