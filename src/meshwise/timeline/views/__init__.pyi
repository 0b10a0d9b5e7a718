from meshwise.timeline.views import follow as follow
from meshwise.timeline.views import report_text as report_text
from meshwise.timeline.views import run_text as run_text
