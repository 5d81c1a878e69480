"""What exchanges between processes share."""
