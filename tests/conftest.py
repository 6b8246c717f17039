"""What is exhaustive is left out unless it is asked for: `make test-all`."""


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true", help="also run what only `make test-all` runs")


def pytest_collection_modifyitems(config, items):
    if config.getoption("exhaustive"):
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]
