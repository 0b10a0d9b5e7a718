from meshwise.training.process import explain as explain
from meshwise.training.process import same_work as same_work
from meshwise.training.process import session as session
