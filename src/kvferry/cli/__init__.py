"""The kvferry command: a file per command."""
