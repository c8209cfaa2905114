"""Products with packed weights on a CPU: weights are decoded in registers, never in memory. Source: docs/cpu.md."""
