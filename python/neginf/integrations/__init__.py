"""neginf inside other frameworks; one module per framework, imported only when asked for."""
