"""Imports a package that is not installed."""

import a_package_nobody_has  # type: ignore[import-not-found]  # noqa: F401
