"""What users call: the operations, their configurations and the executor they share."""
