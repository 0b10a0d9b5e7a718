from meshwise.training.recording import faults as faults
from meshwise.training.recording import plain_program as plain_program
from meshwise.training.recording import recording as recording
