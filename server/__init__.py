"""HTTP: the frontend process. Nothing below this package knows HTTP."""
