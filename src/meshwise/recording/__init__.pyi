from meshwise.recording import faults as faults
from meshwise.recording import plain_program as plain_program
from meshwise.recording import recording as recording
