from meshwise.checker import check as check
from meshwise.checker import options as options
from meshwise.checker import source_rules as source_rules
from meshwise.checker import views as views
