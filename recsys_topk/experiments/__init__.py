"""The paper's experiments as files: what was asked, what the paper found, how it is run here, and what differs."""
