"""Where every byte of a cache is, and which bytes go where. numpy only."""
