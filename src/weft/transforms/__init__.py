"""The transforms, one room each; file name = function name."""
