"""Starting ranks on this machine, and what they and their launcher leave for each other.

launch_function.py  a function on several ranks, from a notebook or a script
mailbox.py          what they leave for each other, as files in one folder, and how it is pickled
callee.py           the process that runs it
agent.py            the ranks of one node: started, watched, restarted
replicas/           the replicas of an elastic job: each is started again alone
rank_main.py        what a rank does first
preload.py          what ranks find imported when they are forked
plan.py             how many ranks, threads and cores
devices.py          which accelerators they get
slurm.py            the same for a cluster
failures.py         which rank failed first, and with what

Tested by: tests/launching
"""
