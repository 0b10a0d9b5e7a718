from meshwise.training import engine as engine
from meshwise.training import process as process
from meshwise.training import recording as recording
from meshwise.training import tracking as tracking
from meshwise.training import weights as weights
