from tests.agreement.conftest import short_waits  # noqa: F401, the same for these tests
