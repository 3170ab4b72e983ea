"""Engines that hand off through kvferry."""
