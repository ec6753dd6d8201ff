"""Results against the error budget: the assertions that tests of kernels share."""

from flash_versions.versions.oracle.budget import assess, assess_request


def assert_ok(found):
    """Every result is within its budget."""
    for name, accuracy in found.items():
        assert accuracy.ok, f"{name}: {accuracy}"


def assert_within_budget(o, lse, q, k, v, **options):
    """The result of a call; lse may be None."""
    assert_ok(assess(o, lse, q, k, v, **options))


def assert_right(request, o, lse):
    """The result of a request's forward."""
    assert_ok(assess_request({"o": o, "lse": lse}, request))


def assert_gradients_right(request, gradients, do, dlse=None):
    """{name: gradient} of a request, or the gradients in the order of the backward."""
    if not isinstance(gradients, dict):
        gradients = dict(zip(("dq", "dk", "dv", "dsink"), gradients))
    assert_ok(assess_request(gradients, request, do, dlse))
