"""What is wrong with a checkpoint, as told to its user."""


class CheckpointError(ValueError):
    """The checkpoint's files are not what its config.json or the model asks for."""
