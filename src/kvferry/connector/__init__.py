"""What an engine sees: a scheduler half and a worker half."""
