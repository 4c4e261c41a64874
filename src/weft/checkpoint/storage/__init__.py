"""Where checkpoints lie: a directory, or a URL; and which of them are there.

protocol.py        what a directory and a URL have in common
directory.py       a directory: a hidden folder, and one rename
bucket.py          a URL: files, and then a manifest
find.py            which checkpoints there are, and whether they are whole: `latest`, `best`, `verify`
copies.py          checkpoints on this machine, wherever they lie
private_folder.py  temporary folders that only this user can enter

Tested by: tests/checkpoint
"""
