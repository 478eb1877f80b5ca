"""Which versions of the other packages were tested, and what is said about the others.

In: the name of a package. Out: nothing, or an error that says which version to install.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from lazy_backend.errors import LazyBackendError, LazyBackendWarning
from lazy_backend.errors.sites import user_site, warn_user

# What the tests run, by the name to install.
TESTED = {
    "accelerate": "1.15.0",
    "lightning": "2.6.6",
    "pytorch-ignite": "0.5.5",
    "transformers": "5.23.0",
}


def check_version(package: str) -> None:
    """Raise `LazyBackendError` if `package` is missing or of another major version than the one tested.

    An older one of the same major version causes a `LazyBackendWarning`.
    """
    tested = TESTED[package]
    try:
        found = version(package)
    except PackageNotFoundError:
        raise LazyBackendError(
            f"{package} is not installed\n  at {user_site()}\n  pip install '{package}=={tested}', which was tested"
        ) from None
    if _numbers(found)[0] != _numbers(tested)[0]:
        raise LazyBackendError(
            f"{package} {found} is installed, and this integration was written for {package} {tested}\n"
            f"  at {user_site()}\n  pip install '{package}>={tested},<{_numbers(tested)[0] + 1}'"
        )
    if _numbers(found) < _numbers(tested):
        warn_user(
            f"{package} {found} is older than {tested}, with which this integration was tested",
            LazyBackendWarning,
        )


def changed_inside(package: str, what: str) -> LazyBackendError:
    """The error for a newer version of `package` that has no `what` any more."""
    return LazyBackendError(
        f"{package} {version(package)} has no {what}, on which this integration rests\n  at {user_site()}\n"
        f"  pip install '{package}=={TESTED[package]}', which was tested"
    )


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: (5, 23, 0) of "5.23.0.dev0"."""
    numbers: list[int] = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers) or (0,)
