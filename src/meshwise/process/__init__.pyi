from meshwise.process import explain as explain
from meshwise.process import same_work as same_work
from meshwise.process import session as session
