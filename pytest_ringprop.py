"""The entry point of the pytest plugin, in a module whose name nobody else has.

pytest imports it in every project of the environment. Where another `parallel` or `nn` comes first on the path, as in a
project that has a package of that name, pytest starts all the same, without tests on MPI ranks; its header says why.
"""

from importlib.util import find_spec

try:
    _reason = "" if find_spec("parallel.testing.plugin") else "another package named parallel hides ringprop's"
except ImportError as error:
    _reason = str(error)

if _reason:

    def pytest_report_header():
        return f"ringprop: no tests on MPI ranks here: {_reason}"

else:
    pytest_plugins = ["parallel.testing.plugin"]  # registered by this name, once, also where a conftest.py names it
