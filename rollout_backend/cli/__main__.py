from rollout_backend.cli import main

if __name__ == "__main__":
    main()
