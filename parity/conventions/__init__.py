"""Rules of number formats as engines state them, run on the same inputs. Source: docs/conventions.md."""
