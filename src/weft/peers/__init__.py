"""How ranks meet outside of collectives, through the store of the job.

world.py             the ranks of a context, and what is alive of them
agreement.py         meetings of all ranks: values exchanged, facts compared
liveness.py          which ranks live, which left, and which is to blame
store.py             the store, whose requests have a time limit and whose values no stranger can write
connect.py           can the address be reached at which ranks meet?
straggler_watch.py   the threads that see who waits in vain
gloo_connections.py  what ends a wait in vain: connections that are cut, groups that are aborted
quorum.py            which replicas of an elastic job make the next steps together
replica_groups.py    one of these replicas: it meets the others, and loses them
pretended.py         a group whose other ranks are only pretended
ledger.py            facts of one strategy, compared with those of the other ranks

Tested by: tests/peers
"""
