"""The gated delta rule on TPUs."""
