"""Which job runs, and which pool member works for it: `schedule`, a pure decision on the state of the cluster.

jobs ──ready?──► admission (who runs: minimum, priority) ──► shares (how many trainers each) ──► placement (which members)
"""

from master_service.core.decisions.scheduling.admission import needed
from master_service.core.decisions.scheduling.pool_view import lost_places
from master_service.core.decisions.scheduling.schedule import Schedule, schedule

__all__ = ["Schedule", "lost_places", "needed", "schedule"]
