"""Options and header of the suite for pytest."""
