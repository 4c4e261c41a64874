"""The transforms, one file each; file name = function name."""
