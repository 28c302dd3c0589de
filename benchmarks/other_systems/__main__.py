from benchmarks.other_systems.environments import main

raise SystemExit(main())
