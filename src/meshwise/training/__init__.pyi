from meshwise.training import faults as faults
from meshwise.training import model_stream as model_stream
from meshwise.training import plain_program as plain_program
from meshwise.training import same_work as same_work
from meshwise.training import session as session
from meshwise.training import tracking as tracking
