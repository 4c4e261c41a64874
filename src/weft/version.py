"""The version of weft, which ranks compare when they start."""

__version__ = "0.3.0.dev0"
