from meshwise.reports import compare_runs as compare_runs
from meshwise.reports import report as report
from meshwise.reports import views as views
