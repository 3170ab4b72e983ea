"""Code that several commands share. No module here is a command."""
