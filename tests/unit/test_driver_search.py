"""The driver on a device whose first run of a shape looks for kernels, as TensorFlow's does on a GPU."""

from test_driver import BATCH, driver_on, kinds, run_of


def test_what_a_search_for_kernels_takes_in_a_first_run_says_nothing_of_the_others():
    driver = driver_on(10_000, slope=20, searches_kernels=True, search=4000)
    for _ in range(3):
        driver.run("train", BATCH)
    assert not kinds(driver)  # With the search the next step would seem to need 9120 of 10000 bytes.
    assert dict(driver.training.measured["train"].evidence.needs) == {256: 5120}
    assert run_of(driver).peak == 9120


def test_probes_run_twice_where_the_first_run_searches():
    driver = driver_on(10_000, slope=60, searches_kernels=True, search=1000)
    driver.run("train", BATCH)
    assert driver.step.probes
    assert all(need == 60 * size for size, need in driver.training.measured["train"].evidence.needs)
    assert driver.step.done[-1][2] == 2
