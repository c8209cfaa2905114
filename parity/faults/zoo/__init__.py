"""The faults, by family. Each is a few lines; docs/faults.md §3 lists those that nothing here can show."""
