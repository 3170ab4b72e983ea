"""Code that tests share: servers, scripted workers, tiny models. Benchmarks may use it too."""
