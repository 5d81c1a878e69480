"""Kernels in AKG's hybrid DSL, which MindSpore compiles for the device at hand: one rule's arithmetic each.

A kernel takes numbers, then tensors flattened to one dimension, and returns the rows of one tensor. Other forms compile
without a word and are wrong on CPU: of several outputs none is written, and a sum over elements is not one.

An installed package has this folder as ms_optim/akg, which is a link to it in the sources.
"""
