"""The libraries that the audit knows; one module each."""
