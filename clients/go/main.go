// Drives a cluster by the client that openapi-generator gives. Prints what it saw as one JSON object.
package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"time"

	"scenario/trireme"
)

const limit = 60 * time.Second

func given(name string) string {
	value, found := os.LookupEnv(name)
	if !found {
		panic(name + " is not set")
	}
	return value
}

// good gives the answer; a problem ends the program with all that it says.
func good[T any](answer *T, _ *http.Response, err error) *T {
	if err != nil {
		var problem *trireme.GenericOpenAPIError
		if errors.As(err, &problem) {
			panic(fmt.Sprintf("%v: %s", err, problem.Body()))
		}
		panic(err)
	}
	return answer
}

func newKey() string {
	random := make([]byte, 16)
	if _, err := rand.Read(random); err != nil {
		panic(err)
	}
	return hex.EncodeToString(random)
}

func step(found *trireme.JobView) int64 {
	return int64(found.Progress.GetStep())
}

func main() {
	job, ctx := given("SCENARIO_JOB"), context.Background()
	configuration := trireme.NewConfiguration()
	configuration.Servers = trireme.ServerConfigurations{{URL: given("SCENARIO_URL")}}
	configuration.AddDefaultHeader("Authorization", "Bearer "+given("SCENARIO_TOKEN"))
	client := trireme.NewAPIClient(configuration)

	jobWhen := func(holds func(*trireme.JobView) bool) *trireme.JobView {
		end := time.Now().Add(limit)
		for {
			found := good(client.JobsAPI.GetJob(ctx, job).Execute())
			if holds(found) {
				return found
			}
			if time.Now().After(end) {
				panic(fmt.Sprintf("still %s: %s", found.State, found.Reason))
			}
			time.Sleep(100 * time.Millisecond)
		}
	}

	text, err := os.ReadFile(given("SCENARIO_SCRIPT"))
	if err != nil {
		panic(err)
	}
	dataset := trireme.NewNpy(strings.Split(given("SCENARIO_FILES"), ","), "npy")
	dataset.SetAligned(true)
	settings := trireme.NewJobSettings(trireme.NpyAsDataset(dataset))
	settings.SetEpochs(10_000)
	settings.SetGlobalBatchSize(32)
	settings.SetLanes(4)
	settings.SetRecordsPerTask(16)
	settings.SetBlockBytes(256)
	scheduling := trireme.NewScheduling()
	scheduling.SetMaxTrainers(1)
	asked := trireme.NewCreateJob(job, *settings)
	asked.SetSource(*trireme.NewSource("script.py", string(text)))
	asked.SetScheduling(*scheduling)
	key := newKey()
	created := good(client.JobsAPI.CreateJob(ctx).CreateJob(*asked).IdempotencyKey(key).Execute())
	again := good(client.JobsAPI.CreateJob(ctx).CreateJob(*asked).IdempotencyKey(key).Execute())
	jobWhen(func(found *trireme.JobView) bool { return step(found) >= 1 })

	tasks, pages := map[string]bool{}, 0
	for token := ""; pages == 0 || token != ""; pages++ {
		page := good(client.TasksAPI.ListTasks(ctx, job).PageSize(5).PageToken(token).Execute())
		for _, task := range page.Tasks {
			tasks[task.TaskId] = true
		}
		token = page.GetNextPageToken()
	}

	// ended gives the operation once it has ended well.
	ended := func(operation *trireme.Operation) *trireme.Operation {
		for operation.GetState() == "RUNNING" {
			operation = good(client.OperationsAPI.GetOperation(ctx, operation.OperationId, job).WaitS(4).Execute())
		}
		if operation.GetState() != "DONE" {
			panic(fmt.Sprintf("%s %s: %s", operation.Kind, operation.GetState(), operation.GetReason()))
		}
		return operation
	}
	readJob := func() *trireme.JobView { return good(client.JobsAPI.GetJob(ctx, job).Execute()) }

	cause := trireme.NewCreateCheckpoint()
	cause.SetCause("scenario")
	operation := ended(good(client.CheckpointsAPI.CreateCheckpoint(ctx, job).CreateCheckpoint(*cause).IdempotencyKey(newKey()).Execute()))

	numbers := trireme.NewCreateResize()
	numbers.SetTrainers(2)
	resize := ended(good(client.ResizesAPI.CreateResize(ctx, job).CreateResize(*numbers).IdempotencyKey(newKey()).Execute())).GetResize()

	before := step(readJob())
	ended(good(client.JobsAPI.PauseJob(ctx, job).WaitS(4).IdempotencyKey(newKey()).Execute()))
	paused := readJob()
	ended(good(client.JobsAPI.ResumeJob(ctx, job).IdempotencyKey(newKey()).Execute()))
	jobWhen(func(found *trireme.JobView) bool { return found.State == "RUNNING" && step(found) > before })

	events := []int64{}
	for after := int64(0); len(events) < 3; {
		page := good(client.EventsAPI.ListEvents(ctx, job).After(after).WaitS(4).PageSize(2).Execute())
		for _, event := range page.Events {
			events = append(events, event.EventId)
		}
		after = page.NextAfter
	}

	_, _, err = client.TasksAPI.GetTask(ctx, "no-such-task", job).Execute()
	var failure *trireme.GenericOpenAPIError
	if !errors.As(err, &failure) {
		panic(fmt.Sprintf("a task that does not exist was shown: %v", err))
	}
	problem, typed := failure.Model().(trireme.Problem)
	if !typed {
		panic(fmt.Sprintf("no problem: %T", failure.Model()))
	}
	ended(good(client.JobsAPI.CancelJob(ctx, job).IdempotencyKey(newKey()).Execute()))
	cancelled := readJob()
	told, err := json.Marshal(map[string]any{
		"version":    good(client.SystemAPI.GetVersion(ctx).Execute()).Version,
		"same":       created.GetCreateTime() == again.GetCreateTime(),
		"tasks":      len(tasks),
		"pages":      pages,
		"checkpoint": operation.GetState(),
		"resize":     resize.GetPhase(),
		"trainers":   resize.Trainers,
		"events":     events,
		"problem":    problem.Code,
		"states":     []string{paused.State, cancelled.State},
	})
	if err != nil {
		panic(err)
	}
	fmt.Println(string(told))
}
