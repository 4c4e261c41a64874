"""What a checkpoint is on disk.

manifest.py           the one JSON file that says what a checkpoint consists of
plain_files.py        reading files and JSON that may come from anywhere
hashes.py             which hash a file has
safetensors_write.py  safetensors files with hashes, brought to the disk for certain
safetensors_read.py   tensors out of the files, block by block
tensor_blocks.py      which part of a tensor a rank holds, who holds the same, and which rank writes it
transfer.py           blocks of files into tensors of any dtype, for `restore` and `load_weights`

Tested by: tests/checkpoint
"""
