"""A miniature of the library, with one toy operation: what CONTRIBUTING.md walks through, so that its steps cannot rot."""
