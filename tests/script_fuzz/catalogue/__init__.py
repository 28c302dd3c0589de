"""All that a generated script may do differently from a plain one."""

from tests.script_fuzz.catalogue.buffers import BUFFERS
from tests.script_fuzz.catalogue.evaluation import EVALUATION
from tests.script_fuzz.catalogue.loaders import LOADERS
from tests.script_fuzz.catalogue.loop import LOOP
from tests.script_fuzz.catalogue.loss import LOSS
from tests.script_fuzz.catalogue.model import MODEL
from tests.script_fuzz.catalogue.optimizer import OPTIMIZERS, SCHEDULERS
from tests.script_fuzz.catalogue.settings import SETTINGS
from tests.script_fuzz.catalogue.state import STATE

CATALOGUE = (
    *MODEL,
    *STATE,
    *OPTIMIZERS,
    *SCHEDULERS,
    *LOSS,
    *LOOP,
    *LOADERS,
    *SETTINGS,
    *BUFFERS,
    *EVALUATION,
)
