import pytest

pytest.register_assert_rewrite("covenant.testing")
