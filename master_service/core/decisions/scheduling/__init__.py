"""Which job runs, and which pool member works for it: `schedule.schedule`, a pure decision on the state of
the cluster.

jobs ──ready?──► admission (who runs: minimum, priority) ──► shares (how many trainers each)
    ──► placement (which members)
"""
