"""The one exception for input that cannot be used: configs, checkpoints, token ids, traces."""


class BadInput(Exception):
    """Input from outside is damaged or unfit. One line that names file, tensor and offset; exit code 4."""
