"""What looks like a checkpoint in a directory."""

from weft.checkpoint.storage.directory import Directory


def folders(directory):
    """Their folders, oldest first; links are none."""
    return [path for name in Directory(directory).names() if not (path := directory / name).is_symlink()]
