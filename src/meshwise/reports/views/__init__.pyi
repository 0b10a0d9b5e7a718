from meshwise.reports.views import follow as follow
from meshwise.reports.views import report_text as report_text
from meshwise.reports.views import run_text as run_text
