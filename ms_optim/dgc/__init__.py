"""Deep gradient compression: what workers send, how they exchange it, and the step."""
