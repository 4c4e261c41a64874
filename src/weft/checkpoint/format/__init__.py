"""What a checkpoint is on disk.

manifest.py           the one JSON file that says what a checkpoint consists of
commit.py             all or nothing: hidden folder, one rename; `latest`, `verify`
remote.py             checkpoints at a URL: files on their way, and what is there
hashes.py             which hash a file has
safetensors_write.py  safetensors files with hashes, brought to the disk for certain
safetensors_read.py   tensors out of the files, block by block
tensor_blocks.py      which part of a tensor a rank holds, who holds the same, and which rank writes it
transfer.py           blocks of files into tensors of any dtype, for `restore` and `load_weights`
"""
